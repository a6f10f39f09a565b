"""The command line: `foregrad explain` says whether a program compiles, `foregrad doctor` whether Foregrad can work."""
