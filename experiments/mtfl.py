"""MTFL (Mills, Hu, Min, arXiv 2007.09236): private patches by federated optimiser; the study is studies/mtfl.yaml.

Figure 5 of the paper is the study mtfl_figure5; rounds to a user accuracy, the testbed and inequality (10) are in mtfl_tables.
"""

from fedjax_meta.front import program

app = program("mtfl")

if __name__ == "__main__":
    app()
