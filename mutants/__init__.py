"""Known bugs of other engines as changes of this one, a YAML file each, and their runner.

`hybrid-kv mutants` runs them.
"""
