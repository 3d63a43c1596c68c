"""What notebooks and workbooks import: plots, widgets, the small world, mistakes, holes and their lights."""
