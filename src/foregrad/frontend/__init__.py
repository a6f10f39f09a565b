"""What users call: entry points, flattening of arguments, guards."""
