"""The comparison as a page:

page      self-contained HTML
report    the page's sections, tables and pictures
"""
