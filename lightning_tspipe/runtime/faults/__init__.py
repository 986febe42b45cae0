"""How processes of a job look after each other, and how all of them end."""
