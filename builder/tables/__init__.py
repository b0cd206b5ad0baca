"""From text to tables: corpora, counted n-grams, roots, domains, and how much of a text a table covers."""
