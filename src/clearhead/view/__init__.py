"""Pages from an atlas: one self-contained HTML file."""
