"""claiming"""
