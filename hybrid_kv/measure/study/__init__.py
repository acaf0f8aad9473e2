"""Many runs of this program, declared as one matrix, and endless random scenarios."""
