"""`hybrid-kv guard`: is this change still right, and is it still fast?"""
