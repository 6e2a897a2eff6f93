"""What came out, for people: tables, pictures, results as files, and the document of the experiments."""
