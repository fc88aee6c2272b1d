"""Files written whole or not at all, what each was when written, and checked readers."""
