"""The record as a page: one HTML file that needs nothing else. No torch here.

bundle    the JavaScript that draws, from vl-convert-python
figures   what a figure is: a chart, its words, its numbers
curves    numbers over the steps        strips    the ranks' times
matrices  confusion matrices            tables    everything that is no chart
page      all of it as HTML (with page.css and page.js)
"""

from evenly.report.page import page, write_report

__all__ = ["page", "write_report"]
