"""`hybrid-kv bisect`: the first bad commit between a good one and a bad one."""
