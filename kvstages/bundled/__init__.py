"""How the shipped model was made."""
