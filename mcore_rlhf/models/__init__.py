"""What a model is: its parameters, and how each of them is cut. Tables, no logic."""
