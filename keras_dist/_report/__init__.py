"""How figures are printed, as text, HTML and JSON. Imports nothing else of this package.

* `report.py`: the base class of reports.
* `tables.py`: tables and bars, as text and as HTML for notebooks.
* `units.py`: bytes, counts, seconds and percentages as people read them.
* `as_json.py`: values as numbers, strings, lists and dicts.
* `variable_groups.py`: variables of equal blocks as one row.
* `progress.py`: what long work is doing.
"""
