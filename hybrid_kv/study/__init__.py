"""Many runs of this program, declared as one matrix; resumable, on this machine or on Ray."""
