"""What csrc/adam does, in Python and torch's operators: used without the native part."""
