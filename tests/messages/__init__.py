"""Every text that a user can read, in one reviewed file: `snapshot.md`.

Each module here belongs to a room of the package, and its `CASES` give each text a name: a function that raises it,
warns of it, or returns it. `python -m pytest tests/test_messages.py -n 0 --update-messages` writes the file anew; its
diff is what a reviewer reads. Other tests assert types and offending values, not prose.
"""
