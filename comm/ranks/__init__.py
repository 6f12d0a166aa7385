"""How ranks meet, agree, and report to each other what failed."""
