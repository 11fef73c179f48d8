"""Figures as text, HTML and JSON, commands that install packages, and warnings. Imports nothing else of this package.

* `report.py`: the base class of reports, and their conversion to numbers, strings, lists and dicts.
* `tables.py`: tables and bar charts, as text and as HTML for notebooks.
* `figures.py`: bar charts as figures of matplotlib, an extra.
* `units.py`: formats bytes, counts, seconds and percentages.
* `variable_groups.py`: groups the variables of equal blocks into one row.
* `progress.py`: shows the progress of long operations.
* `install_advice.py`: the commands that messages advise, to install what is missing.
* `user_warnings.py`: warnings that point at the user's code.
* `argument_errors.py`: errors about names and arguments that do not exist, with the closest ones.
"""
