"""The marks on a loop and the clock they drive: where a step begins and ends, and which phase it is in."""
