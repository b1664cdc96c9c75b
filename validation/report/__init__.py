"""The comparison as a page:

page      self-contained HTML
pictures  timelines and memory as inline SVG
report    the page's sections and tables
"""
