"""What memory/ draws, with matplotlib, which only these files import."""
