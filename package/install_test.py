#!/usr/bin/env python3
print("to come")
