"""serialization"""
