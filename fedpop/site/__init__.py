"""What a site does with a round or a question, on its data and its states: the only such place."""
