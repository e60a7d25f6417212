"""What is done to a model as a whole: where its banks live, what is kept out, and the way back."""
