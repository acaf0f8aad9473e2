"""What an exported test is made of, as the repository that gets it writes files."""
