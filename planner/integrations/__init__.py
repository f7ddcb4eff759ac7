"""Planning in the trainers that people have; each module needs its library, imported only when used."""
