"""Reports of plans.

* `plan_report.py`: `Plan`, as data and as a printed report.
* `plan_figure.py`: its figure; `forecast_section.py`: the part about the forecast of step time.
* `compare.py`: several plans in one table.
"""
