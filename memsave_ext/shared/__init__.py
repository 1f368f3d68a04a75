"""What several rooms use: tables and axes of reports, checks, a model's modules and their calls."""
