"""Capture a program: find what it reads beyond its arguments, record it, guard it, undo what recording did."""
