"""Injects known bugs and generated mutants into a copy of the package, and says what catches them first."""
