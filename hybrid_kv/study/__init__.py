"""Many runs of this program, declared as one matrix, and scenarios without end; on this machine or on Ray."""
