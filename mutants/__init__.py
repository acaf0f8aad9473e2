"""Known bugs of other engines as changes of this one, a YAML file each, and what runs them: `hybrid-kv mutants`."""
