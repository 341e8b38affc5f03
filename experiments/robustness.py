"""Robust aggregation against attacks, for plain and personalised methods; the study is studies/robustness.yaml."""

from fedjax_meta.front import program

app = program("robustness")

if __name__ == "__main__":
    app()
