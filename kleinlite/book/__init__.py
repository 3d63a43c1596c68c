"""What makes the book: promotion, running and cleaning notebooks, the site, its API pages, plots and widgets."""
