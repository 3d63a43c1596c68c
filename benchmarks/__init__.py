"""What a picture costs in memory and time, and what quantizing costs."""
