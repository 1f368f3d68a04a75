"""What is cheap to compute again is not kept, one operator at a time: csrc/remat."""
