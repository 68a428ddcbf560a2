"""suspension"""
