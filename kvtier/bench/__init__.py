"""`kvtier bench`: each module measures one thing and returns its figures; the command prints them."""
