"""What a bank of experts is made of, and what looks like one."""
