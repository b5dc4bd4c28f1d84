"""What verbs print and the reports that they leave: lines, tables, pages."""
