"""The cache folder: what searches found, remembered from run to run in files that anyone can read and delete."""
