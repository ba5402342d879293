"""What the worker does on the CPU: attention, and what is observed and moved behind it."""
