"""A first look at the library; `make run` sets everything up and runs it. The study is studies/quickstart.yaml."""

from fedjax_meta.front import program

app = program("quickstart")

if __name__ == "__main__":
    app()
