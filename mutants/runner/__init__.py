"""The runner of mutants: it injects each into a copy of the package and says what catches it."""
