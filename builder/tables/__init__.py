"""From text to tables: corpora, counted n-grams, roots and domains, and what a table knows."""
