"""What a page is: its bytes (`layout`), identity (`fingerprint`), name (`chain`) and storage form (`envelope`)."""
