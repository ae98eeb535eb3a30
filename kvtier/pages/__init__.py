"""What a page is: its bytes (`layout`), its identity (`fingerprint`), its name (`chain`), its storage form (`envelope`)."""
