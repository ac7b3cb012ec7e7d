"""Results as one page, figures and tables. Start with ``collect.py``, then ``page.py``.

collect.py     files -> ``Results``, one frozen object; ``commands.py``: the command of each row
series.py      ``Results`` -> the numbers behind each figure; ``costs.py``: multiply-adds
figures.py     which figures there are; ``drawings.py``: their marks; ``canvas.py``: PNG and SVG
tables.py      ``Results`` -> tables; ``formats.py``: CSV, Markdown, LaTeX and HTML;
               ``published.py``: numbers of others
page.py        all of it -> one self-contained page; ``board.py``, ``exhibits.py``: its sections
"""
