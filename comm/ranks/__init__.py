"""How ranks find each other, agree, and tell each other what failed."""
