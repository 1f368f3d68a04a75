"""What a step does not use at the moment, in memory elsewhere: gradients and weights."""
